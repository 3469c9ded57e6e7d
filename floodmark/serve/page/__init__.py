"""The page for people: what it shows, in which words and charts, and the requests that it answers."""
