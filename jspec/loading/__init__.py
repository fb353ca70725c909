"""Models: from files, a hub or the caller's own code, with their memory and compiled programs."""
