"""From what a request wants its text to look like to a grammar; masks are made of it in `sampling`."""
