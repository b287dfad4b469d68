"""The words of Carpool: request, outcome, errors, and the ports between the stages. Imports nothing of the rest."""
