"""TRL's SFTTrainer."""
