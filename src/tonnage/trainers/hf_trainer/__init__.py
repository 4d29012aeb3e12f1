"""Hugging Face's Trainer."""
