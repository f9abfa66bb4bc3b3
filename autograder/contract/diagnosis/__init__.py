"""What explains a wrong result: patterns in values, in scale, in bytes, and parts that another device has."""
