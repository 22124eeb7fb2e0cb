from takifugu.cli import entry

entry()
