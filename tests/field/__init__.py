"""What people who run such systems hit: one test per case, named after its slug; docs/field-cases.md has the table."""
