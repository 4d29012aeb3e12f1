"""`python -m tonnage` is `tonnage`."""

from tonnage.cli.main import main

main()
