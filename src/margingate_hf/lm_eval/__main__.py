"""`python -m margingate_hf.lm_eval`."""

from .registration import main

if __name__ == "__main__":
    main()
