import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")      # before anything imports cutlass
