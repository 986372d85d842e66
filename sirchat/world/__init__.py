"""The generator of made-up talk: facts, small talk, questions. For training, studies and bench."""
