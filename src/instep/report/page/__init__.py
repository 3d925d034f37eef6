"""The report page: one HTML file for one run, or for two compared.

Turns figures into markup; computes none itself. Way in: `page.write_report`.
"""
