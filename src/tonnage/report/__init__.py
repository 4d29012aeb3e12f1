"""Views of an Estimate and of a Solution: terminal text and web pages.  They show values and compute nothing new."""
