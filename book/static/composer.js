// Sphinx fetches each hit to quote from it; browsers forbid that between local files.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
