import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        return nn.functional.cross_entropy(self.net(inputs), target)

    def validation_step(self, batch, batch_idx):
        inputs, target = batch
        right = (self.net(inputs).argmax(dim=1) == target).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def train_dataloader(self):
        dataset = TensorDataset(images[:1536], digits[:1536])
        return DataLoader(dataset, 32, sampler=DistributedSampler(dataset, shuffle=False))

    def val_dataloader(self):
        return DataLoader(TensorDataset(images[1536:], digits[1536:]), 32)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=5)
    model = Digits()
    trainer.fit(model)
    trainer.print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
    if trainer.is_global_zero:
        torch.save(model.net.state_dict(), "model.pt")
