"""The notation: letters of axes, layouts, and tables of rows, with their forms and spellings."""
