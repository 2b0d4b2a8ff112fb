"""Redaction: secrets, addresses, home folders and user names become placeholders before a state leaves the machine."""

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
from composer_nb.redaction.redactor import Redactor, assert_clean
from composer_nb.redaction.spans import PLACEHOLDERS, NotCleanError, Redaction, RedactionReport

__all__ = [
    "PLACEHOLDERS",
    "Detector",
    "NotCleanError",
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
]
