"""The package that handles rows: the session, schemas, staging and scanning.

Only this package may import PySpark, and only when rows must move: a query of a lake's state never pays for it.
Importing this package imports none of PySpark, PyArrow or PyIceberg.
"""
