"""The trainer stage: megatron-core GRPO on batches from the run directory."""

import warnings

# megatron-core says at import, and at some calls, that Transformer Engine and Apex are absent: that is how it is used
# here, and a failing run shows the last lines of this log to people.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
