"""The generator of synthetic dialogue: facts, small talk, questions; for training and studies."""
