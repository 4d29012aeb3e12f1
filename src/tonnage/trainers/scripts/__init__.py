"""The scripts that exports hand out, as they are: `job.py` beside one `train.py`.  They know nothing of tonnage."""
