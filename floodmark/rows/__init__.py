"""The room that touches rows: the session, schemas, staging and scanning.

The only room that may import PySpark, and only when rows must move: asking for the state of a lake never pays for it.
Importing this package imports none of PySpark, PyArrow or PyIceberg.
"""
