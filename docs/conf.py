"""The site: `make docs` builds it, without a network, from outputs of tutorials that are stored."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))
sys.path.insert(0, str(ROOT / "src"))

import transformer_xl  # noqa: E402

project = "Transformer-XL"
author = "The transformer_xl authors"
copyright = author
version = release = transformer_xl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    # In scripts/docs.
    "docstrings",
    "languages",
    "mathml",
    "outside_links",
    "page_fixes",
    "playground",
    "reference_pages",
    "tutorials",
]
# True warns about links to names without a page. Nearly all are types in signatures: of jaxtyping,
# numpy and the standard library, whose inventories are not here, and classes that are not public.
nitpicky = False
exclude_patterns = ["tutorials/outputs", "generated/notebooks"]
# Pages of tasks are added by globs.
suppress_warnings = ["toc.empty_glob"]
# Single backticks in docstrings are code.
default_role = "code"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "tutorials")
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 80
napoleon_use_rtype = False
napoleon_use_ivar = True
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.inv"),
    "transformers": (
        "https://huggingface.co/docs/transformers/",
        "inventories/transformers.inv",
    ),
}

html_theme = "furo"
html_title = "Transformer-XL"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("span.js", {"defer": "defer"})]
html_search_language = "en+zh"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5cad", "color-brand-content": "#0b5cad"},
    "dark_css_variables": {"color-brand-primary": "#7db8ff", "color-brand-content": "#7db8ff"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp"
