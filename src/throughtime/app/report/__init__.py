"""Reports as self-contained HTML pages: a page model, charts, and a module for each report."""
