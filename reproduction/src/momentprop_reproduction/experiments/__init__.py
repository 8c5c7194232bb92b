"""The paper's experiments: sections 4.1 (toy), 4.2 (uci) and 4.3 (cifar), each from training to figures."""
