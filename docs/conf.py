"""Settings of the site: `make docs` builds it with Sphinx, in English and Chinese.

The pages are Markdown that GitHub shows as well. What they need besides is in `_site.py`.
"""

import sys
from pathlib import Path

import throughtime

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for _site and _translation

project = "throughtime"
author = "the authors of throughtime"
version = release = throughtime.__version__
html_title = "throughtime"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "_site",
    "_translation",
]
exclude_patterns = ["_*", "locale", "inventories"]
templates_path = ["_templates"]

# Markdown as GitHub reads it: its anchors of headings, its equations.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

# Notebooks have no stored outputs: they run here, and a cell that fails fails the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 300  # seconds for each cell
nb_merge_streams = True

# Docstrings are Google style; a single backtick is a name, linked where it has a page.
default_role = "py:obj"
autosummary_generate = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 72
add_module_names = False

# The inventory beside the address serves where there is no network.
intersphinx_timeout = 3
intersphinx_mapping = {
    name: (address, (None, str(HERE / "inventories" / f"{name}.txt")))
    for name, address in (
        ("torch", "https://docs.pytorch.org/docs/stable/"),
        ("numpy", "https://numpy.org/doc/stable/"),
    )
}

smartquotes = False  # options begin with two hyphens
language = "en"
locale_dirs = ["locale"]
gettext_compact = False  # one file of translations for each page
gettext_uuid = False

html_theme = "furo"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
pygments_dark_style = "github-dark"
html_search_scorer = str(HERE / "_templates" / "search_ranking.js")
copybutton_prompt_text = ">>> |... |$ "
copybutton_prompt_is_regexp = False
html_theme_options = {
    "top_of_page_buttons": ["view", "edit"],  # view: the page in the other language
    "source_repository": "https://github.com/throughtime/throughtime/",
    "source_branch": "main",
    "source_directory": "docs/",
}
