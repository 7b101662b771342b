"""What the package itself needs and no program calls: loading, registering, options, variables, addresses."""
