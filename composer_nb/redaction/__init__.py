"""Redaction: secrets, personal data, addresses, home folders and user names become placeholders before a state leaves the machine."""

from composer_nb.redaction.detectors import (
    Detector,
    Span,
    assigned_spans,
    home_name,
    home_spans,
    ip_spans,
    kingfisher_spans,
    known_spans,
    mail_spans,
)
from composer_nb.redaction.personal import KINDS, Personal
from composer_nb.redaction.redactor import SECRETS, Redactor, assert_clean
from composer_nb.redaction.spans import PLACEHOLDERS, NotCleanError, Redaction, RedactionReport
from composer_nb.redaction.syntax import syntax_spans
from composer_nb.redaction.vendors import vendor_spans

__all__ = [
    "KINDS",
    "PLACEHOLDERS",
    "SECRETS",
    "Detector",
    "NotCleanError",
    "Personal",
    "Redaction",
    "RedactionReport",
    "Redactor",
    "Span",
    "assert_clean",
    "assigned_spans",
    "home_name",
    "home_spans",
    "ip_spans",
    "kingfisher_spans",
    "known_spans",
    "mail_spans",
    "syntax_spans",
    "vendor_spans",
]
