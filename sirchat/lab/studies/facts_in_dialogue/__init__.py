"""`sirchat eval chatter`: facts told amid real chatter, and asked for later."""
