"""Where the test files of others are: in an installed package, or in its sdist, fetched by pip and kept beside it.

python tests/outside/sources.py      fetches what is lacking, into the virtual environment that runs it
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# Packages whose wheels have no tests. jax's sdist has none either, so its own suites are out of reach of pip.
SDISTS = ("flax",)


def version(package):
    """The version that is installed, of which the tests are taken."""
    return importlib.metadata.version(package)


def root_of(package):
    """The folder that paths of a package's test files start from; it may be lacking."""
    if package in SDISTS:
        return Path(sys.prefix) / "outside" / f"{package}-{version(package)}"
    found = importlib.util.find_spec(package)
    assert found is not None, package
    assert found.origin is not None, package
    return Path(found.origin).parent


def fetch(package):
    """Unpack the sdist of the installed version beside the installed packages."""
    root = root_of(package)
    if root.exists():
        return
    root.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["--no-deps", "--no-binary", ":all:", f"{package}=={version(package)}"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--dest", folder, *wanted], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as sdist:
            sdist.extractall(root.parent, filter="data")


if __name__ == "__main__":
    for name in SDISTS:
        fetch(name)
        print(root_of(name))
