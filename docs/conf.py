"""Sphinx configuration; `make docs` builds with warnings as errors."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TQDM_DISABLE"] = "1"  # progress bars do not look well in print

import hvp

project = "hvp"
author = "The hvp developers"
copyright = author
release = version = hvp.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "mathml",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "**/GALLERY_HEADER.rst", "sg_execution_times.rst"]
templates_path = []

autodoc_typehints = "none"  # the docstrings say it, with shapes
autodoc_default_options = {"members": True, "inherited-members": "LinearOperator"}
autodoc_member_order = "bysource"
autosummary_generate = True
napoleon_google_docstring = False
napoleon_use_rtype = False
default_role = "text"  # code, or a formula: see mathml.py

sphinx_gallery_conf = {
    "within_subsection_order": "gallery_order.place_of",
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "download_all_examples": False,
    "show_memory": False,
    "copyfile_regex": r"$^",
    "write_computation_times": False,
    "image_scrapers": ("thumbnails.scrape",),
    "thumbnail_size": (560, 400),
}


def _tables_of_derivatives(app, docname, source):
    """Put the tables that the package looks in where a page asks for them."""
    from why_missing import WHY

    from hvp._derivatives.missing import MISSING_DERIVATIVES, WRONG_AT_VALUES

    missing = [(kind, WHY[kind], row.remedy) for kind, row in sorted(MISSING_DERIVATIVES.items())]
    wrong = [(kind, *row) for kind, row in sorted(WRONG_AT_VALUES.items())]
    for name, title, head, rows in (
        (
            "missing-derivatives",
            "What is refused",
            ("operation", "why it is not put right", "what to do"),
            missing,
        ),
        (
            "wrong-at-values",
            "What is refused at some values",
            ("operation", "where there are", "what to do"),
            wrong,
        ),
    ):
        table = f".. list-table:: {title}\n   :header-rows: 1\n\n"
        for cells in (head, *((f"``{kind}``", *rest) for kind, *rest in rows)):
            table += "".join(f"   {'*' if i == 0 else ' '} - {c}\n" for i, c in enumerate(cells))
        source[0] = source[0].replace(f".. {name}::", table)


def setup(app):
    import thumbnails

    app.connect("source-read", _tables_of_derivatives)
    app.connect("builder-inited", thumbnails.replace, priority=999)  # after the gallery is made


html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "hvp"
html_static_path = ["static"]
html_css_files = ["hvp.css"]
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "show_nav_level": 2,
}
html_show_sourcelink = False
toc_object_entries_show_parents = "hide"
# The guide has a list of its pages at the left; a page that has no others below it needs none.
html_sidebars = {"index": [], "reference": [], "gallery/**": []}
