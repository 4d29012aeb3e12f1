"""Views of an Estimate: terminal text and a web page.  Nothing here computes; what is shown was in the value."""
