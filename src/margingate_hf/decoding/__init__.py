"""From a request to committed tokens: checks, preparation, the decode loop, acceptance, and receipts."""
