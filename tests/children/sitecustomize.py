"""Hides bitsandbytes from launched processes: diffusers would import it, which takes two seconds.

Most users do not have it either.
"""

import sys

sys.modules["bitsandbytes"] = None
