"""Lets launched processes start and end sooner: importing a trainer takes about half the time.

bitsandbytes is hidden, because diffusers would import it, and most users do not have it. There are
no full garbage collections while modules are imported and at the end, because they find nothing.
triton would complain of that at the end, so it is hidden as well; nothing launched here needs it.
"""

import atexit
import gc
import sys

sys.modules["bitsandbytes"] = sys.modules["triton"] = None
gc.set_threshold(*gc.get_threshold()[:2], 1000)
atexit.register(gc.freeze)
