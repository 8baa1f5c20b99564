"""`python -m lowprec` is the command line."""

from lowprec.cli import main

main()
