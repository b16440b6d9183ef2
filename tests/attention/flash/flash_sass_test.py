"""Instructions of the flash kernels: the widest products there are, registers handed from the warps
that bring tiles to the warps that compute, nothing spilled.

    flash_sass_test.py CUOBJDUMP OBJECT...
"""

import pathlib
import re
import subprocess
import sys

KERNEL = re.compile(r"attend_(\d+)_(\d+)_(bfloat16|float16)_(position|ids)(_cap)?\.cu\.o")
# The one kernel that may spill a little says so in its build rule.
MAY_SPILL = "attend_256_256_float16_ids_cap.cu.o", "attend_256_256_bfloat16_ids_cap.cu.o"


def faults_of(path, sass):
    """Complaints about a kernel's instructions."""
    _, value_dim, dtype = KERNEL.fullmatch(path.name).group(1, 2, 3)
    columns = 128 if int(value_dim) <= 128 else 80
    suffix = ".F32.BF16" if dtype == "bfloat16" else ".F32"
    wanted = {f"HGMMA.64x{columns}x16{suffix}", f"HGMMA.64x{value_dim}x16{suffix}"}
    products = set(re.findall(r"\bHGMMA\.[0-9A-Za-z.]+", sass))
    if products != wanted:
        yield f"products {sorted(products)}, expected {sorted(wanted)}"
    for instruction in "UTMALDG.4D", "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC":
        if instruction not in sass:
            yield f"no {instruction}"
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    if spills and path.name not in MAY_SPILL:
        yield f"{spills} spills"


def main(cuobjdump, *objects):
    kernels = [path for path in map(pathlib.Path, objects) if KERNEL.fullmatch(path.name)]
    faults = []
    for path in kernels:
        sass = subprocess.run([cuobjdump, "-sass", path], stdout=subprocess.PIPE, text=True, check=True).stdout
        faults += [f"{path.name}: {fault}" for fault in faults_of(path, sass)]
    print(*faults, f"{len(kernels)} kernels, {len(faults)} faults", sep="\n")
    return 1 if faults or not kernels else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
