"""axolotl."""
