"""One front door: a coordinator serves HTTPS, members dial out; knows nothing of what is trained."""
