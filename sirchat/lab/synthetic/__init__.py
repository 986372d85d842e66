"""The generator of synthetic dialogue for training and studies: facts, small talk, questions."""
