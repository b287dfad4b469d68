"""The demo: a control panel on the live page, the load that it steers, and one by one beside carpool."""
