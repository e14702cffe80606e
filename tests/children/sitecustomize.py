"""Processes that tests launch find no bitsandbytes, which diffusers would import, for two seconds.

Most users have none either.
"""

import sys

sys.modules["bitsandbytes"] = None
