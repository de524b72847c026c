"Packaging: everything is read from settings.ini, the one file that nbdev and setuptools share."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="], interpolation=None)
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

EXTRAS = ("demo", "kernels", "notebook", "test", "docs")
extras = {name: cfg[f"{name}_requirements"].split() for name in EXTRAS}
extras["dev"] = sorted({req for reqs in extras.values() for req in reqs})

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    packages=find_packages(include=["dglu", "dglu.*"]),
    package_data={"dglu": ["*.mplstyle"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": ["dglu=dglu._modidx:d"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
    ],
    zip_safe=False,
)
