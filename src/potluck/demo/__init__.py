"""A real model learns smart-home commands: data, training and answers in one command."""
