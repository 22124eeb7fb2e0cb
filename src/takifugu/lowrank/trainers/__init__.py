"""`WarmStart` in other people's training loops. Each file needs the library it is named after."""
