"""A worker that predicts. Way in: `predictor.Predictor`."""
