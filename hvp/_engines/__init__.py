"""From a rule to a linear map: traced and split, or left to tapes."""
