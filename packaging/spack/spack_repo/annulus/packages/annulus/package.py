from pathlib import Path

from spack_repo.builtin.build_systems.cmake import CMakePackage, generator
from spack_repo.builtin.build_systems.cuda import CudaPackage

from spack.package import *


class Annulus(CMakePackage, CudaPackage):
    """Exact attention over sequences sharded across MPI ranks: a C++20 library and a program."""

    # The recipe builds the sources that it lies in.
    git = Path(__file__).resolve().parents[6].as_uri()

    license("Apache-2.0")

    version("main", branch="main")

    variant("program", default=True, description="Build the program annulus")
    variant("nccl", default=True, when="+cuda", description="Exchange data between nodes by NCCL")

    generator("ninja")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("pkgconfig", type="build")

    depends_on("mpi@3.1:")
    depends_on("fmt@9:")
    depends_on("spdlog@1.10:")
    depends_on("nlohmann-json@3.11:")
    depends_on("openblas@0.3.21:")
    depends_on("highway@1.0.3:")
    depends_on("boost@1.74: +program_options", when="+program")
    # The tests run the program.
    depends_on("boost@1.74: +program_options", type="test")
    depends_on("googletest@1.12: +gmock", type="test")
    depends_on("py-numpy", type="test")

    depends_on("cuda@12.5:", when="+cuda")
    depends_on("nccl@2.18:", when="+nccl")

    conflicts("%gcc@:11", msg="C++20 needs GCC 12 or later")

    def cmake_args(self):
        spec = self.spec
        args = [
            self.define_from_variant("ANNULUS_CUDA", "cuda"),
            self.define_from_variant("ANNULUS_BUILD_PROGRAM", "program"),
            self.define("ANNULUS_BUILD_TESTS", self.run_tests),
            self.define("ANNULUS_BUILD_BENCHMARKS", False),
            self.define("ANNULUS_PYTHON", False),
            # Spack has no package of the headers through which cuDNN is called.
            self.define("CMAKE_DISABLE_FIND_PACKAGE_CUDNN", True),
        ]
        if spec.satisfies("+cuda ~nccl"):
            args.append(self.define("CMAKE_DISABLE_FIND_PACKAGE_NCCL", True))
        if spec.satisfies("+cuda") and "none" not in spec.variants["cuda_arch"].value:
            # Hopper's own instructions need 90a.
            names = {"90": "90a-real", "90a": "90a-real"}
            architectures = spec.variants["cuda_arch"].value
            args.append(
                self.define(
                    "CMAKE_CUDA_ARCHITECTURES", ";".join(names.get(a, a) for a in architectures)
                )
            )
        return args
