"""Megatron-Core and Megatron-Bridge."""
