"""Solutions of equations as functions of what the equations depend on."""
