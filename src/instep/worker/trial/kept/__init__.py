"""Do optimizers and losses keep what no checkpoint has, or amplify rounding?"""
