"""Where objects are kept: the contract, the backends behind it and the stores around them."""
