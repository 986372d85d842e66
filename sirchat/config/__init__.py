"""The settings of sirchat: their types and limits, and the files and flags that set them."""
