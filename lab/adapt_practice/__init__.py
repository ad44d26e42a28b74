"""adapt_practice: the practice that trains controllers for `esper.adapt`."""
